"""One suite run over every transform, against one corpus of awkward trees."""
