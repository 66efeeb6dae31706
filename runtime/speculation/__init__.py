"""Several tokens per pass of the target, the same text: drafters, verification, and who decides between them."""
