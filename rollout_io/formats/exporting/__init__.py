"""Code shared by exporters; `formats.NAME_export.write` exports to one project's format."""
