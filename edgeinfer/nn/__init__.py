"""A decoder in numpy: what the reference backend computes, and calibration, probes and checks of conversions."""
