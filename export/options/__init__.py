"""What a caller may ask of an export."""
