/* native.c: turn.h over libibverbs' inline calls.
 *
 * Everything here goes through the function pointers of the object's own context, so nothing of rdma-core is linked.
 * Work requests are translated in chunks on the stack; nothing is allocated.
 */
#define _GNU_SOURCE
#include "turn.h"

#include <errno.h>
#include <infiniband/verbs.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

enum { SEND_CHUNK = 32, RECV_CHUNK = 64, POLL_CHUNK = 32 };

/* rdma_rxe reports a receive with invalidate by the kernel's flag value (0x4) instead of IBV_WC_WITH_INV (0x8). 0x4 is
 * IBV_WC_IP_CSUM_OK, which RC receives never carry. See orbit/verbs/quirks.py. */
enum { WITH_INV_ANY = IBV_WC_WITH_INV | 0x4 };

/* What the kernel writes to a completion channel (struct ib_uverbs_comp_event_desc). */
struct comp_event {
    uint64_t cq_handle;
};

static void *object(uint64_t address)
{
    return (void *)(uintptr_t)address;
}

int turn_abi(void)
{
    return TURN_ABI;
}

uint32_t turn_sizes(void)
{
    return (uint32_t)sizeof(struct turn_wr) | (uint32_t)sizeof(struct turn_recv) << 8 |
           (uint32_t)sizeof(struct turn_wc) << 16 | (uint32_t)sizeof(struct turn_qp_attr) << 24;
}

/* Providers return a positive errno; some paths return -1 or -errno. */
static int refused(int rc)
{
    if (rc > 0)
        return -rc;
    return rc == -1 ? -EIO : rc;
}

static int translate(struct ibv_send_wr *to, struct ibv_sge *sge, const struct turn_wr *from)
{
    memset(to, 0, sizeof *to);
    to->wr_id = from->wr_id;
    to->send_flags = (from->flags & TURN_SIGNALED ? IBV_SEND_SIGNALED : 0) |
                     (from->flags & TURN_FENCE ? IBV_SEND_FENCE : 0) |
                     (from->flags & TURN_INLINE ? IBV_SEND_INLINE : 0);
    switch (from->opcode) {
    case TURN_SEND:
        to->opcode = IBV_WR_SEND;
        break;
    case TURN_SEND_WITH_INV:
        to->opcode = IBV_WR_SEND_WITH_INV;
        to->invalidate_rkey = from->rkey;
        break;
    case TURN_READ:
    case TURN_WRITE:
        to->opcode = from->opcode == TURN_READ ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE;
        to->wr.rdma.remote_addr = from->remote_addr;
        to->wr.rdma.rkey = from->rkey;
        break;
    case TURN_LOCAL_INV:
        to->opcode = IBV_WR_LOCAL_INV;
        to->invalidate_rkey = from->rkey;
        return 0;
    case TURN_BIND_WINDOW:
        if (!from->window || !from->region)
            return -EINVAL;
        if (from->remote_addr & TURN_KEY_NOW)
            turn_set_window_key(from->window, (uint32_t)from->remote_addr);
        to->opcode = IBV_WR_BIND_MW;
        to->bind_mw.mw = object(from->window);
        to->bind_mw.rkey = from->rkey;
        to->bind_mw.bind_info.mr = object(from->region);
        to->bind_mw.bind_info.addr = from->local_addr;
        to->bind_mw.bind_info.length = from->length;
        to->bind_mw.bind_info.mw_access_flags =
            (from->access & TURN_REMOTE_READ ? IBV_ACCESS_REMOTE_READ : 0) |
            (from->access & TURN_REMOTE_WRITE ? IBV_ACCESS_REMOTE_WRITE : 0);
        return 0;
    default:
        return -EINVAL;
    }
    if (from->length > UINT32_MAX)
        return -EMSGSIZE;
    if (from->length) {
        sge->addr = from->local_addr;
        sge->length = (uint32_t)from->length;
        sge->lkey = from->lkey;
        to->sg_list = sge;
        to->num_sge = 1;
    }
    return 0;
}

int turn_post_send(uint64_t qp, const struct turn_wr *wrs, uint32_t count, uint32_t *accepted)
{
    struct ibv_send_wr chain[SEND_CHUNK], *bad;
    struct ibv_sge sges[SEND_CHUNK];
    uint32_t done = 0;

    *accepted = 0;
    if (!qp)
        return -EBADF;
    while (done < count) {
        uint32_t n = count - done < SEND_CHUNK ? count - done : SEND_CHUNK, i;
        int rc, bad_entry = 0;

        for (i = 0; i < n; i++) {
            bad_entry = translate(&chain[i], &sges[i], &wrs[done + i]);
            if (bad_entry)
                break;
            if (i)
                chain[i - 1].next = &chain[i];
        }
        if (!i)
            return bad_entry;
        bad = NULL;
        rc = ibv_post_send(object(qp), chain, &bad);
        if (rc) {
            /* A provider that failed after it took them (rxe: the doorbell) leaves `bad` alone. */
            if (bad >= chain && bad < chain + i)
                *accepted = done + (uint32_t)(bad - chain);
            else
                *accepted = UINT32_MAX;
            return refused(rc);
        }
        done += i;
        *accepted = done;
        if (bad_entry)
            return bad_entry;
    }
    return 0;
}

/* To a queue pair, or to a shared receive queue. */
static int post_recvs(uint64_t to, bool shared, const struct turn_recv *recvs, uint32_t count, uint32_t *accepted)
{
    struct ibv_recv_wr chain[RECV_CHUNK], *bad;
    struct ibv_sge sges[RECV_CHUNK];
    uint32_t done = 0;

    *accepted = 0;
    if (!to)
        return -EBADF;
    while (done < count) {
        uint32_t n = count - done < RECV_CHUNK ? count - done : RECV_CHUNK, i;
        int rc;

        for (i = 0; i < n; i++) {
            const struct turn_recv *from = &recvs[done + i];

            sges[i] = (struct ibv_sge){.addr = from->addr, .length = from->length, .lkey = from->lkey};
            chain[i] = (struct ibv_recv_wr){.wr_id = from->wr_id,
                                            .next = i + 1 < n ? &chain[i + 1] : NULL,
                                            .sg_list = from->length ? &sges[i] : NULL,
                                            .num_sge = from->length ? 1 : 0};
        }
        bad = NULL;
        rc = shared ? ibv_post_srq_recv(object(to), chain, &bad) : ibv_post_recv(object(to), chain, &bad);
        if (rc) {
            if (bad >= chain && bad < chain + n)
                *accepted = done + (uint32_t)(bad - chain);
            else
                *accepted = UINT32_MAX;
            return refused(rc);
        }
        done += n;
        *accepted = done;
    }
    return 0;
}

int turn_post_recv(uint64_t qp, const struct turn_recv *recvs, uint32_t count, uint32_t *accepted)
{
    return post_recvs(qp, false, recvs, count, accepted);
}

int turn_post_srq_recv(uint64_t srq, const struct turn_recv *recvs, uint32_t count, uint32_t *accepted)
{
    return post_recvs(srq, true, recvs, count, accepted);
}

int turn_poll(uint64_t cq, struct turn_wc *out, uint32_t max)
{
    struct ibv_wc polled[POLL_CHUNK];
    uint32_t done = 0;

    if (!cq)
        return -EBADF;
    while (done < max) {
        int want = max - done < POLL_CHUNK ? (int)(max - done) : POLL_CHUNK;
        int got = ibv_poll_cq(object(cq), want, polled);

        if (got < 0)
            return done ? (int)done : -EIO; /* the next poll meets it again */
        for (int i = 0; i < got; i++) {
            const struct ibv_wc *from = &polled[i];
            int invalidating = from->status == IBV_WC_SUCCESS && from->opcode == IBV_WC_RECV &&
                               from->wc_flags & WITH_INV_ANY;

            out[done++] = (struct turn_wc){
                .wr_id = from->wr_id,
                .status = from->status,
                .opcode = from->opcode,
                .byte_len = from->byte_len,
                .qp_num = from->qp_num,
                .vendor_err = from->vendor_err,
                .wc_flags = from->wc_flags,
                .invalidated = invalidating ? from->invalidated_rkey : 0,
            };
        }
        if (got < want)
            break;
    }
    return (int)done;
}

int turn_arm(uint64_t cq)
{
    int rc;

    if (!cq)
        return -EBADF;
    rc = ibv_req_notify_cq(object(cq), 0); /* 0: solicited_only would hide error completions */
    return rc ? refused(rc) : 0;
}

/* What ibv_ack_cq_events does; ibv_destroy_cq waits for this count. */
static void acknowledge(struct ibv_cq *cq, uint32_t events)
{
    pthread_mutex_lock(&cq->mutex);
    cq->comp_events_completed += events;
    pthread_cond_signal(&cq->cond);
    pthread_mutex_unlock(&cq->mutex);
}

int turn_drain_events(uint64_t channel, uint64_t cq)
{
    struct ibv_comp_channel *from = object(channel);
    struct comp_event event;
    int events = 0;

    (void)cq; /* the event itself names its queue */
    if (!channel)
        return -EBADF;
    for (;;) {
        ssize_t got = read(from->fd, &event, sizeof event);

        if (got == (ssize_t)sizeof event) {
            acknowledge(object(event.cq_handle), 1);
            events++;
        } else if (got < 0 && errno == EINTR) {
            continue;
        } else if (got < 0 && errno == EAGAIN) {
            return events;
        } else {
            return events ? events : got < 0 ? -errno : -EIO;
        }
    }
}

void turn_before_sleep(uint64_t channel)
{
    (void)channel;
}

int turn_channel_fd(uint64_t channel)
{
    return channel ? ((struct ibv_comp_channel *)object(channel))->fd : -EBADF;
}

int turn_async_fd(uint64_t context)
{
    return context ? ((struct ibv_context *)object(context))->async_fd : -EBADF;
}

void turn_set_window_key(uint64_t window, uint32_t key)
{
    if (window)
        ((struct ibv_mw *)object(window))->rkey = key;
}

uint32_t turn_window_key(uint64_t window)
{
    return window ? ((struct ibv_mw *)object(window))->rkey : 0;
}

static int path_mtu(uint32_t bytes, enum ibv_mtu *mtu)
{
    switch (bytes) {
    case 256:
        *mtu = IBV_MTU_256;
        return 0;
    case 512:
        *mtu = IBV_MTU_512;
        return 0;
    case 1024:
        *mtu = IBV_MTU_1024;
        return 0;
    case 2048:
        *mtu = IBV_MTU_2048;
        return 0;
    case 4096:
        *mtu = IBV_MTU_4096;
        return 0;
    default:
        return -EINVAL;
    }
}

int turn_modify(uint64_t modify_fn, uint64_t qp, const struct turn_qp_attr *attr)
{
    int (*modify)(struct ibv_qp *, struct ibv_qp_attr *, int) =
        (int (*)(struct ibv_qp *, struct ibv_qp_attr *, int))object(modify_fn);
    struct ibv_qp_attr to = {.qp_state = (enum ibv_qp_state)attr->state};
    int mask = IBV_QP_STATE, rc;

    if (!modify_fn || !qp)
        return -EBADF;
    switch (attr->state) {
    case IBV_QPS_INIT:
        to.pkey_index = (uint16_t)attr->pkey_index;
        to.port_num = (uint8_t)attr->port;
        to.qp_access_flags = attr->access;
        mask |= IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        break;
    case IBV_QPS_RTR:
        rc = path_mtu(attr->path_mtu, &to.path_mtu);
        if (rc)
            return rc;
        to.dest_qp_num = attr->dest_qpn;
        to.rq_psn = attr->rq_psn;
        to.max_dest_rd_atomic = (uint8_t)attr->max_dest_rd_atomic;
        to.min_rnr_timer = (uint8_t)attr->min_rnr_timer;
        to.ah_attr.port_num = (uint8_t)attr->port;
        to.ah_attr.dlid = (uint16_t)attr->dlid;
        to.ah_attr.sl = (uint8_t)attr->service_level;
        to.ah_attr.is_global = attr->is_global ? 1 : 0;
        if (attr->is_global) {
            memcpy(to.ah_attr.grh.dgid.raw, attr->dgid, sizeof attr->dgid);
            to.ah_attr.grh.sgid_index = (uint8_t)attr->sgid_index;
            to.ah_attr.grh.hop_limit = (uint8_t)attr->hop_limit;
            to.ah_attr.grh.traffic_class = (uint8_t)attr->traffic_class;
        }
        mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                IBV_QP_MIN_RNR_TIMER;
        break;
    case IBV_QPS_RTS:
        to.sq_psn = attr->sq_psn;
        to.max_rd_atomic = (uint8_t)attr->rd_atomic;
        to.timeout = (uint8_t)attr->timeout;
        to.retry_cnt = (uint8_t)attr->retry_cnt;
        to.rnr_retry = (uint8_t)attr->rnr_retry;
        mask |= IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY;
        break;
    case IBV_QPS_RESET:
    case IBV_QPS_ERR:
        break;
    default:
        return -EINVAL;
    }
    rc = modify(object(qp), &to, mask);
    return rc ? refused(rc) : 0;
}
