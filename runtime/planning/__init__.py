"""From a bundle, a budget and a device to a plan: configurations, their memory, their speed, the choice among them."""
