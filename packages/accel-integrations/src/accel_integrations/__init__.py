"""Ways to train: engines, number formats, prepared optimizers and compilation behind one interface."""
