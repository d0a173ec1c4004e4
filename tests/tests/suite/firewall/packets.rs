//! Real packets, in both families, where the node drops what nobody accepts.
