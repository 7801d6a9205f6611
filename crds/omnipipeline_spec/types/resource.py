"""The names of the resource: API group, version, kind, plural, and the annotation of a converted class.

Here: the strings alone, once. Called by `loading`, `generating` and tests.
"""

from __future__ import annotations

from typing import Final

GROUP: Final = "omnipipeline.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "OmniPipeline"
PLURAL: Final = "omnipipelines"
#: Of a resource that was made from a subclass of `PipelineConfig`: which one. A note; nothing imports it.
CLASS_ANNOTATION: Final = f"{GROUP}/config-cls"
