//! Clients' API keys as written.

use super::section;

section! {
    /// Who may use the API.
    #[schemars(extend("required" = ["keys"]))]
    Auth {
        /// The keys, at least one.
        keys: Vec<ClientKey> = Vec::new();
    }
}

section! {
    /// One client's key and what it may do.
    #[schemars(extend("required" = ["name", "sha256"]))]
    ClientKey {
        /// Its name in metrics and logs.
        name: String = String::new();
        /// SHA-256 of the key, in hex; `pointsman key` makes a key and prints this.
        sha256: String = String::new();
        /// The models, aliases and adapters it may use. A model's name stands for its aliases too. Left
        /// out, all of them.
        models: Option<Vec<String>> = None;
        /// Requests a minute; a minute's worth may come at once. Further ones get 429.
        requests_per_minute: Option<u32> = None, min 1;
        /// Tokens a minute, of prompts and replies; a minute's worth may come at once. While it is
        /// overdrawn requests get 429.
        tokens_per_minute: Option<u32> = None, min 1;
        /// Requests at once; further ones get 429.
        max_in_flight: Option<u32> = None, min 1;
        /// The highest `x-pointsman-priority` that its requests may have; a higher one counts as this.
        max_priority: i8 = 0, min -100, max 100;
    }
}
