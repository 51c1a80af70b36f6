//! Where facts about pods come from.
