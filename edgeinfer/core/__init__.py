"""What everything stands on: errors, options, results, records."""
