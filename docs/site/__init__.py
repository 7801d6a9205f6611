"""The documentation as a site: `python -m docs.site` builds it into build/site."""
