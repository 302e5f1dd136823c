"""Which part of a model goes to which device."""
