"""An answer that is one of some texts."""
