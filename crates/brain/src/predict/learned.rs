//! The constants that hold: a profile, times what the filters make of it. Each pool has filters of
//! its own; where it has measured too little, those of the pool that has measured most stand in,
//! because the workers of one model are rarely of different kinds. Kept over a restart as `Learned`.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::filter::{Average, Filter, Kept};
use super::physics::{Batch, Constants, Link, Prefill};
use crate::fleet::Role;
use crate::profile::Profile;

/// Output length that is expected before any was seen, in tokens.
const FIRST_OSL: f64 = 256.0;

/// Weight of one request in the output length that is expected.
const OSL_WEIGHT: f64 = 0.02;

/// Layout of what is kept.
const VERSION: u32 = 1;

/// Workers of one role.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pool {
    pub(super) prefill: Filter<3>,
    pub(super) decode: Filter<3>,
}

/// Everything that is learned of one model.
#[derive(Clone, Debug)]
pub(super) struct Knowledge {
    profile: Profile,
    pools: [Pool; 3],
    transfer: Filter<2>,
    osl: Average,
    /// What holds by all of these.
    constants: [Constants; 3],
    link: Link,
}

/// What was learned of one model, as it is kept in a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Learned {
    version: u32,
    profile: Profile,
    prefill: Vec<Kept>,
    decode: Vec<Kept>,
    transfer: Kept,
    osl: Average,
}

/// Why what was kept cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotRestored {
    /// Of another version.
    Version,
    /// It started from other constants.
    Profile,
    /// Numbers that cannot be.
    Broken,
}

impl fmt::Display for NotRestored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            NotRestored::Version => "it was written by another version",
            NotRestored::Profile => "it was learned from other constants than those configured",
            NotRestored::Broken => "it holds numbers that cannot be",
        })
    }
}

impl std::error::Error for NotRestored {}

fn index(role: Role) -> usize {
    match role {
        Role::Prefill => 0,
        Role::Decode => 1,
        Role::Unified => 2,
    }
}

impl Knowledge {
    pub(super) fn new(profile: Profile) -> Knowledge {
        Knowledge {
            profile,
            pools: [Pool::default(); 3],
            transfer: Filter::default(),
            osl: Average::starting_at(FIRST_OSL),
            constants: [Constants::of(&profile); 3],
            link: Link::of(&profile),
        }
    }

    pub(super) fn of(&self, role: Role) -> &Constants {
        let [prefill, decode, unified] = &self.constants;
        match role {
            Role::Prefill => prefill,
            Role::Decode => decode,
            Role::Unified => unified,
        }
    }

    pub(super) fn link(&self) -> &Link {
        &self.link
    }

    pub(super) fn osl(&self) -> f64 {
        self.osl.value
    }

    pub(super) fn osl_average(&self) -> Average {
        self.osl
    }

    pub(super) fn profile(&self) -> &Profile {
        &self.profile
    }

    /// The filters of a pool, own or not.
    pub(super) fn filters(&self, role: Role) -> Pool {
        let own = self.pools[index(role)];
        let most = |of: fn(&Pool) -> &Filter<3>| {
            let own = of(&own);
            let other = self.pools.iter().map(of).max_by_key(|filter| filter.samples());
            *other.filter(|other| !own.is_warm() && other.is_warm()).unwrap_or(own)
        };
        Pool { prefill: most(|pool| &pool.prefill), decode: most(|pool| &pool.decode) }
    }

    pub(super) fn transfer(&self) -> &Filter<2> {
        &self.transfer
    }

    pub(super) fn is_cold(&self, remote: bool) -> bool {
        let warm = |of: fn(&Pool) -> &Filter<3>| self.pools.iter().any(|pool| of(pool).is_warm());
        let computed = warm(|pool| &pool.prefill) && warm(|pool| &pool.decode);
        !(computed && (!remote || self.transfer.is_warm()))
    }

    /// Whether the measured pool is warm, so that a single worker can be told from it.
    pub(super) fn learn_prefill(&mut self, role: Role, work: Prefill, seconds: f64) -> bool {
        let parts = work.parts(&Constants::of(&self.profile));
        let filter = &mut self.pools[index(role)].prefill;
        let warm = filter.is_warm();
        filter.learn(parts, seconds);
        self.renew();
        warm
    }

    /// As [`Knowledge::learn_prefill`].
    pub(super) fn learn_decode(&mut self, role: Role, batch: Batch, seconds: f64) -> bool {
        let parts = batch.parts(&Constants::of(&self.profile));
        let filter = &mut self.pools[index(role)].decode;
        let warm = filter.is_warm();
        filter.learn(parts, seconds);
        self.renew();
        warm
    }

    pub(super) fn learn_transfer(&mut self, tokens: u32, seconds: f64) {
        self.transfer.learn(Link::of(&self.profile).parts(tokens), seconds);
        self.link = Link::of(&self.profile).scaled(self.transfer.theta());
    }

    pub(super) fn learn_osl(&mut self, tokens: f64) {
        self.osl.learn(tokens.max(1.0), OSL_WEIGHT);
    }

    fn renew(&mut self) {
        let base = Constants::of(&self.profile);
        self.constants = [Role::Prefill, Role::Decode, Role::Unified].map(|role| {
            let Pool { prefill, decode } = self.filters(role);
            base.scaled(prefill.theta(), decode.theta())
        });
    }

    pub(super) fn keep(&self) -> Learned {
        Learned {
            version: VERSION,
            profile: self.profile,
            prefill: self.pools.iter().map(|pool| pool.prefill.keep()).collect(),
            decode: self.pools.iter().map(|pool| pool.decode.keep()).collect(),
            transfer: self.transfer.keep(),
            osl: self.osl,
        }
    }

    pub(super) fn restore(&mut self, learned: &Learned) -> Result<(), NotRestored> {
        if learned.version != VERSION {
            return Err(NotRestored::Version);
        }
        if !learned.profile.is_like(&self.profile) {
            return Err(NotRestored::Profile);
        }
        let filters = |kept: &[Kept]| -> Option<[Filter<3>; 3]> {
            let filters: Option<Vec<_>> = kept.iter().map(Filter::restore).collect();
            filters?.try_into().ok()
        };
        let all = (
            filters(&learned.prefill),
            filters(&learned.decode),
            Filter::restore(&learned.transfer),
        );
        let (Some(prefill), Some(decode), Some(transfer)) = all else {
            return Err(NotRestored::Broken);
        };
        if !(learned.osl.value.is_finite() && learned.osl.value >= 1.0) {
            return Err(NotRestored::Broken);
        }
        for ((pool, prefill), decode) in self.pools.iter_mut().zip(prefill).zip(decode) {
            *pool = Pool { prefill, decode };
        }
        self.transfer = transfer;
        self.link = Link::of(&self.profile).scaled(transfer.theta());
        self.osl = learned.osl;
        self.renew();
        Ok(())
    }
}
