"""Reports of commands as pages for a browser: ``--html``, and a checkpoint in a notebook."""
