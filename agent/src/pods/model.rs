//! Plain facts about pods.
