"""Known faults of this field, replayed. Each test names a kind of fault and varies it."""
