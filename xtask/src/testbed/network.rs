//! The private network of a test bed.
//!
//! Everything of a test bed, its API server, nodes and pods, lives in one network namespace, joined to the
//! machine by one pair of interfaces. Ports are therefore the usual ones, several test beds stand beside
//! each other, and bridges, packet filter rules and addresses go when the namespace goes.
//!
//! Test bed number `i` has nodes in 10.201.`i`.0/24 and pods in 10.(208+`i`).0.0/16. The machine reaches
//! both; services (10.96.0.0/16) are reached from nodes and pods only.

use super::process::{Place, Process, run_at};
use crate::sh;
use anyhow::{Context, Result, bail};
use std::process::Command;

/// How many test beds can stand at once, by the address plan.
const TESTBEDS: u8 = 16;

/// The range of service addresses.
pub(crate) const SERVICES: &str = "10.96.0.0/16";

/// The address plan of one test bed.
#[derive(Clone, Copy)]
pub(crate) struct Plan(pub(crate) u8);

impl Plan {
    /// The first plan that nothing on this machine uses.
    pub(crate) fn free() -> Result<Plan> {
        let routes = sh::output(Command::new("ip").args(["-4", "route", "show", "table", "all"]))?;
        let links = sh::output(Command::new("ip").args(["-o", "link", "show"]))?;
        let used = |plan: &Plan| {
            routes.contains(&format!("10.201.{}.", plan.0))
                || routes.contains(&format!("10.{}.", 208 + plan.0))
                || links.contains(&format!(" {}@", plan.interface()))
        };
        let free = (0..TESTBEDS).map(Plan).find(|plan| !used(plan));
        free.with_context(|| format!("all {TESTBEDS} address ranges of test beds (10.201.0.0/20) are in use"))
    }

    /// The machine's end of the pair.
    pub(crate) fn interface(self) -> String {
        format!("gstb{}", self.0)
    }

    fn host(self) -> String {
        format!("10.201.{}.1", self.0)
    }

    /// Where the API server listens.
    pub(crate) fn api(self) -> String {
        format!("10.201.{}.2", self.0)
    }

    /// Where names are resolved.
    pub(crate) fn dns(self) -> String {
        format!("10.201.{}.3", self.0)
    }

    /// The address of the node with an index.
    pub(crate) fn node(self, index: usize) -> Result<String> {
        let last = 11 + index;
        if last > 254 {
            bail!("a test bed has room for 244 real nodes: use --kwok for more");
        }
        Ok(format!("10.201.{}.{last}", self.0))
    }

    pub(crate) fn pods(self) -> String {
        format!("10.{}.0.0/16", 208 + self.0)
    }

    /// The pods' way out.
    pub(crate) fn gateway(self) -> String {
        format!("10.{}.0.1", 208 + self.0)
    }

    /// Joins the network of `holder` to the machine and gives it the addresses.
    pub(crate) fn connect(self, holder: Process, nodes: usize) -> Result<()> {
        let outside = |args: &str| sh::output(Command::new("ip").args(args.split(' '))).map(drop);
        let inside = |args: &str| run_at(Command::new("ip").args(args.split(' ')), &Place::Network(holder)).map(drop);
        let (link, host, api) = (self.interface(), self.host(), self.api());
        outside(&format!("link add {link} type veth peer name eth0 netns {}", holder.pid))?;
        outside(&format!("addr add {host}/24 dev {link}"))?;
        outside(&format!("link set {link} up"))?;
        inside("link set lo up")?;
        inside("link set eth0 up")?;
        inside(&format!("addr add {api}/24 dev eth0"))?;
        inside(&format!("addr add {}/24 dev eth0", self.dns()))?;
        for index in 0..nodes {
            inside(&format!("addr add {}/24 dev eth0", self.node(index)?))?;
        }
        inside(&format!("route add default via {host}"))?;
        outside(&format!("route add {} via {api}", self.pods()))
    }

    /// Removes the pair of interfaces, if it is there.
    pub(crate) fn disconnect(self) -> Result<()> {
        let link = self.interface();
        let exists = || std::path::Path::new("/sys/class/net").join(&link).exists();
        if exists() {
            // The namespace may be on its way out and take the interface along meanwhile.
            let removed = sh::output(Command::new("ip").args(["link", "delete", &link]));
            if exists() {
                removed?;
            }
        }
        Ok(())
    }
}
