"""An executor that splits one model over several processes of a host, a GPU for each."""
