"""Code as users write it, to be judged by a type checker."""
