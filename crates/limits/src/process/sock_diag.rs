//! Bytes of every TCP connection, from the kernel's socket diagnostics (netlink).

use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_sock_diag::SockDiagMessage;
use netlink_packet_sock_diag::constants::{AF_INET, AF_INET6, IPPROTO_TCP};
use netlink_packet_sock_diag::inet::nlas::Nla;
use netlink_packet_sock_diag::inet::{ExtensionFlags, InetRequest, SocketId, StateFlags};
use netlink_sys::Socket;
use netlink_sys::protocols::NETLINK_SOCK_DIAG;
use std::collections::HashMap;
use std::io;

/// Where `struct tcp_info` counts bytes (Linux 4.1 and later). The struct grows with the kernel, so it is not
/// read as a whole.
const BYTES_ACKED: usize = 120;
const BYTES_RECEIVED: usize = 128;

/// Bytes of every TCP connection in this network namespace, by the inode of its socket.
pub(super) fn connections() -> io::Result<HashMap<u64, u64>> {
    let mut socket = Socket::new(NETLINK_SOCK_DIAG)?;
    socket.bind_auto()?;
    let mut found = HashMap::new();
    for (family, socket_id) in [(AF_INET, SocketId::new_v4()), (AF_INET6, SocketId::new_v6())] {
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | NLM_F_DUMP;
        let request = InetRequest {
            family,
            protocol: IPPROTO_TCP,
            extensions: ExtensionFlags::INFO,
            states: StateFlags::ESTABLISHED | StateFlags::FIN_WAIT1 | StateFlags::FIN_WAIT2 | StateFlags::CLOSE_WAIT,
            socket_id,
        };
        let mut packet = NetlinkMessage::new(header, SockDiagMessage::InetRequest(request).into());
        packet.finalize();
        let mut bytes = vec![0; packet.buffer_len()];
        packet.serialize(&mut bytes);
        socket.send(&bytes, 0)?;
        while read_part(&socket, &mut found)? {}
    }
    Ok(found)
}

/// Reads one datagram of a dump; `false` if it was the last.
fn read_part(socket: &Socket, found: &mut HashMap<u64, u64>) -> io::Result<bool> {
    let (datagram, _) = socket.recv_from_full()?;
    let mut rest = &datagram[..];
    while !rest.is_empty() {
        let message = NetlinkMessage::<SockDiagMessage>::deserialize(rest).map_err(io::Error::other)?;
        match message.payload {
            NetlinkPayload::Done(_) => return Ok(false),
            NetlinkPayload::Error(error) => return Err(error.to_io()),
            NetlinkPayload::InnerMessage(SockDiagMessage::InetResponse(response)) => {
                for attribute in &response.nlas {
                    if let Nla::TcpInfo(info) = attribute {
                        found.insert(response.header.inode.into(), bytes_in(info));
                    }
                }
            }
            _ => {}
        }
        // Messages are aligned to four bytes.
        let length = (message.header.length as usize).next_multiple_of(4);
        rest = rest.get(length.max(16)..).unwrap_or_default();
    }
    Ok(true)
}

/// Received bytes plus sent and acknowledged bytes. The shorter answer of an older kernel counts as 0.
fn bytes_in(info: &[u8]) -> u64 {
    let number = |at: usize| info.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_ne_bytes);
    number(BYTES_ACKED).saturating_add(number(BYTES_RECEIVED))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_answers_count_nothing() {
        for length in 0..BYTES_RECEIVED + 8 {
            bytes_in(&vec![0xff; length]);
        }
        assert_eq!(bytes_in(&[0; 40]), 0);
    }
}
