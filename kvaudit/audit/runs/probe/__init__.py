"""The same items to an endpoint every quarter: what is asked, what it says, and ordinary records of it."""
