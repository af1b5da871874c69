"""Properties that hold for every tree, checked on trees that hypothesis makes."""
