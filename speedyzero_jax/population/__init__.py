"""Population Based Training: selection and exploration over run folders."""
