"""The HTTP side of each engine: routes, rules and words as documented and seen in the release it stands for."""
