from hypothesis import settings

from tests.engine.conftest import folders as folders
from tests.engine.conftest import start as start

# Every run tries the same inputs; `HYPOTHESIS_PROFILE=long` in the environment tries many more, and new ones.
settings.register_profile("ci", derandomize=True, max_examples=150, deadline=None, database=None)
settings.register_profile("long", max_examples=20_000, deadline=None)
