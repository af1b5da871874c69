"""Other packages' states, with these packages themselves: ``make integration`` (never part of ``make test``)."""
