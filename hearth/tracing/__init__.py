"""Reading traces from the files that the services of a stack write: find one, lay it out, draw it."""
