"""What is measured of a model or a device, tuned and calibrated for it, and learnt from it, beside replies."""
