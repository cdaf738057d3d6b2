"""What several tests share: runs without engines, engines without servers, servers without engines, rank processes."""

from hypothesis import settings

settings.register_profile("weightstream", deadline=None, max_examples=30, derandomize=True)
settings.load_profile("weightstream")
