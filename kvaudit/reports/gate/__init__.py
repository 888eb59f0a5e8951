"""Rules, the family of tests, the decision, waivers: from a drift to a verdict, once."""
