"""Which replicas run a request, by what each choice is predicted to cost."""
