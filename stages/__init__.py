"""What a chain is made of. A stage of your own derives from `stages.base.Stage`, `GroupMapper` or `Rename`."""
