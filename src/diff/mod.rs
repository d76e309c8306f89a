//! Two of prefix, lock and request compared.
