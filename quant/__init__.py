"""How many bits each weight gets and how its values are quantized; knows nothing of graphs or checkpoints."""
