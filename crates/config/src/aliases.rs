//! Variables that people have from NVIDIA Dynamo and its forks, read as the keys they mean here.
//!
//! Invariants: each one that is set gives one notice with the native key, or a problem that stops
//! the start. They rank above the file and below `POINTSMAN__` variables. Not here: values' ranges,
//! which are those of the native keys.

use std::sync::Arc;

use crate::check::check;
use crate::environment::{Environment, PREFIX, lay};
use crate::problem::{Problem, nearest};
use crate::schema::{self, either};
use crate::tree::{Key, Node, Origin, Value, quoted};
use crate::yaml;

const SWITCH: &str = "DYN_ROUTER_CONDITIONAL_DISAGG";
const POLICY: &str = "DYN_ROUTER_CONDITIONAL_DISAGG_POLICY";
const CONFIG: &str = "DYN_ROUTER_CONDITIONAL_DISAGG_CONFIG";
const SHORT_SWITCH: &str = "DYNAMO_USE_CONDITIONAL_DISAGGREGATION";
const GATE_SWITCH: &str = "KV_ROUTER_USE_ISL_THRESHOLD";
const GATE: &str = "KV_ROUTER_ISL_THRESHOLD";

/// Variables that hold the value of one key of `routing`.
const VALUES: [(&str, &str); 5] = [
    ("DYN_ROUTER_CONDITIONAL_DISAGG_EFF_ISL_THRESHOLD", "eff_isl_threshold"),
    ("DYN_ROUTER_CONDITIONAL_DISAGG_EFF_ISL_RATIO_THRESHOLD", "eff_isl_ratio_threshold"),
    ("DYN_ROUTER_CONDITIONAL_DISAGG_PREFILL_BUSY_THRESHOLD", "prefill_busy_threshold"),
    ("DYN_ROUTER_CONDITIONAL_DISAGG_DECODE_BUSY_THRESHOLD", "decode_busy_threshold"),
    ("DYNAMO_SHORT_PREFILL_THRESHOLD_TOKENS", "short_prefill_tokens"),
];

/// Keys of the JSON object in `CONFIG`, which have the same names here.
const CONFIG_KEYS: [&str; 5] = [
    "policy",
    "eff_isl_threshold",
    "eff_isl_ratio_threshold",
    "prefill_busy_threshold",
    "decode_busy_threshold",
];

/// The policies that `POLICY` and `CONFIG` know.
const POLICIES: [&str; 3] = ["isl_bounding", "prefill_load", "isl_or_load"];

/// What the aliases say.
pub(crate) struct Aliases {
    /// The layer they make; empty where one of them is wrong.
    pub(crate) tree: Node,
    pub(crate) notices: Vec<String>,
}

/// Reads every alias that is set.
pub(crate) fn read(environment: &Environment, problems: &mut Vec<Problem>) -> Aliases {
    let before = problems.len();
    let mut reader = Reader { environment, tree: Node::empty(), notices: Vec::new(), problems };
    let policy = reader.policy();
    for (variable, key) in VALUES {
        if let Some(text) = reader.text(variable) {
            reader.lay(variable, key, text);
        }
    }
    reader.choose_policy(policy);
    reader.gate();
    let Reader { mut tree, notices, .. } = reader;
    check(&Key::root(), &tree, schema::root(), problems);
    if problems.len() > before {
        tree = Node::empty();
    }
    Aliases { tree, notices }
}

struct Reader<'e, 'p> {
    environment: &'e Environment,
    tree: Node,
    notices: Vec<String>,
    problems: &'p mut Vec<Problem>,
}

impl<'e> Reader<'e, '_> {
    fn text(&mut self, variable: &str) -> Option<&'e str> {
        self.environment.text(variable, self.problems)
    }

    /// Puts a value under `routing` and says so.
    fn lay(&mut self, variable: &str, key: &str, text: &str) {
        let native = format!("{PREFIX}ROUTING__{}", key.to_uppercase());
        let path = Key::root().name("routing").name(key);
        let origin = Origin::Variable(Arc::from(variable));
        if let Err(problem) = lay(&mut self.tree, &path, text, &origin) {
            self.problems.push(problem);
        }
        let value = text.trim();
        self.notices.push(if self.environment.has(&native) {
            format!("{variable} changes nothing: {native} is set")
        } else {
            format!("{variable} is read as `{path}: {value}`; the native variable is {native}")
        });
    }

    /// On or off, where it is set.
    fn switch(&mut self, variable: &str) -> Option<bool> {
        let text = self.text(variable)?;
        match text.trim().to_lowercase().as_str() {
            "1" | "true" | "yes" | "on" => Some(true),
            "0" | "false" | "no" | "off" => Some(false),
            _ => {
                let must = "must be true or false (1 or 0, yes or no, on or off)";
                let message = format!("{variable} {} is not allowed; {must}", quoted(text));
                self.problems.push(Problem::whole(message, ""));
                None
            }
        }
    }

    /// The policy that `POLICY` or else `CONFIG` names. `CONFIG`'s other keys are laid at once.
    fn policy(&mut self) -> Option<(&'static str, String)> {
        let mut policy = self.config().map(|policy| (CONFIG, policy));
        if let Some(text) = self.text(POLICY) {
            self.unused(policy.map(|_| CONFIG), &format!("{POLICY} names the policy"));
            policy = Some((POLICY, text.trim().to_owned()));
        }
        let (variable, name) = policy?;
        if POLICIES.contains(&name.as_str()) {
            return Some((variable, name));
        }
        let must = either(&POLICIES.map(|name| format!("`{name}`")));
        let near = nearest(&name, POLICIES.into_iter());
        let near = near.map(|near| format!("; did you mean `{near}`?")).unwrap_or_default();
        let message = format!("{variable} {} is not allowed; must be {must}{near}", quoted(&name));
        self.problems.push(Problem::whole(message, ""));
        None
    }

    fn config(&mut self) -> Option<String> {
        let text = self.text(CONFIG)?;
        let origin = Origin::Variable(Arc::from(CONFIG));
        let Ok(Node { value: Value::Map(entries), .. }) = yaml::parse_value(text, &origin) else {
            let keys = CONFIG_KEYS.join(", ");
            let message = format!("{CONFIG} is not allowed; must be a JSON object of {keys}");
            self.problems.push(Problem::whole(message, ""));
            return None;
        };
        let mut policy = None;
        for (name, node) in entries {
            match (name.as_str(), &node.value) {
                ("policy", Value::Text(text)) => policy = Some(text.clone()),
                ("policy", value) => policy = Some(value.to_string()),
                (_, value) if CONFIG_KEYS.contains(&name.as_str()) => {
                    let shown = value.to_string();
                    self.lay(CONFIG, &name, &shown);
                }
                _ => {
                    let keys = CONFIG_KEYS.join(", ");
                    let message = format!("{CONFIG} has the unknown key `{name}`; known: {keys}");
                    self.problems.push(Problem::whole(message, ""));
                }
            }
        }
        policy
    }

    /// Which policy all switches together ask for. Off in their world is always remote.
    fn choose_policy(&mut self, policy: Option<(&'static str, String)>) {
        let dynamo = self.switch(SWITCH);
        let short = self.switch(SHORT_SWITCH);
        match (dynamo, short, policy) {
            (Some(true), Some(true), _) => {
                let message = format!(
                    "{SWITCH} and {SHORT_SWITCH} ask for different policies; switch on only one"
                );
                self.problems.push(Problem::whole(message, ""));
            }
            (None, Some(true), Some((variable, _))) => {
                let message = format!(
                    "{variable} and {SHORT_SWITCH} ask for different policies; set only one"
                );
                self.problems.push(Problem::whole(message, ""));
            }
            (Some(false), _, Some((variable, _))) => {
                self.unused(Some(variable), &format!("{SWITCH} is off"));
                self.switched(dynamo, short);
            }
            (_, _, Some((variable, name))) => {
                self.lay(variable, "policy", &name);
                let named = format!("{variable} names the policy");
                self.unused(dynamo.map(|_| SWITCH), &named);
                self.unused(short.map(|_| SHORT_SWITCH), &named);
            }
            (_, _, None) => self.switched(dynamo, short),
        }
    }

    fn switched(&mut self, dynamo: Option<bool>, short: Option<bool>) {
        let (variable, policy) = match (dynamo, short) {
            (Some(true), _) => (SWITCH, "isl_bounding"),
            (_, Some(true)) => (SHORT_SWITCH, "short_prompt"),
            (Some(false), _) => (SWITCH, "always_remote"),
            (_, Some(false)) => (SHORT_SWITCH, "always_remote"),
            (None, None) => return,
        };
        self.lay(variable, "policy", policy);
        let both =
            dynamo.and(short).map(|_| if variable == SWITCH { SHORT_SWITCH } else { SWITCH });
        self.unused(both, &format!("{variable} decides"));
    }

    /// Says that a variable, if it is set, changes nothing by itself.
    fn unused(&mut self, variable: Option<&str>, because: &str) {
        self.notices.extend(variable.map(|name| format!("{name} changes nothing: {because}")));
    }

    fn gate(&mut self) {
        let switch = self.switch(GATE_SWITCH);
        let threshold = self.text(GATE);
        match (switch, threshold) {
            (Some(true), Some(text)) => {
                self.lay(GATE, "isl_gate", text);
                self.unused(Some(GATE_SWITCH), &format!("{GATE} sets the key"));
            }
            (Some(true), None) => {
                let message = format!("{GATE_SWITCH} is on; {GATE} must be set, to an integer");
                self.problems.push(Problem::whole(message, ""));
            }
            (Some(false), threshold) => {
                self.lay(GATE_SWITCH, "isl_gate", "off");
                self.unused(threshold.map(|_| GATE), &format!("{GATE_SWITCH} is off"));
            }
            (None, Some(_)) => self.unused(Some(GATE), &format!("{GATE_SWITCH} is not on")),
            (None, None) => {}
        }
    }
}
