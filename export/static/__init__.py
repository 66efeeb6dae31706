"""Export for devices that run fixed shapes only."""
