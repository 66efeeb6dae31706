"""Weight files on this device: their layout, their pages, their verification, what streaming them costs."""
