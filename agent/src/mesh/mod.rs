//! How each mesh marks its pods.
