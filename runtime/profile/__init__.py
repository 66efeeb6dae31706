"""What was measured or tuned on this device, kept between sessions."""
