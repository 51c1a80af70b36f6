//! Where the agent looks on the nodes of each platform.
