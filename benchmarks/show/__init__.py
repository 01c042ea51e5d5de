"""Records as a person reads them: tables, charts, and the pages that are generated from the recorded runs."""
