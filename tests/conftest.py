"""What every test starts from: no label store of the developer's own."""

import os

os.environ.pop("TRAPPM_DATABASE", None)
