"""What stands beside a verdict: doses, churn, where losses sit, seeds, other methods. Nothing here changes it."""
