"""The test suite: unit, laws (hypothesis), contract (every transform), real (published files)."""
