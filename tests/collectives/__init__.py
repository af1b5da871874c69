"""The collectives, held to what they promise on real ranks: models, disagreements, dead ranks, awkward trees."""
