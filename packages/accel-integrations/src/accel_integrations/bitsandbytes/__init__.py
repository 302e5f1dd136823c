"""Models whose linear layers bitsandbytes keeps in 8 or 4 bits."""
