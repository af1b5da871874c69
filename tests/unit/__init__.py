"""One file a module of the package, under the same name."""
