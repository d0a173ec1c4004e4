//! Many nodes at once.
