/* The yardstick of the TCP path: a plain C send/recv loop on loopback, both ends pinned.
 *
 * tcp_baseline [bytes] [rounds] [sender_cpu] [receiver_cpu]
 * Two processes; the receiver asks with one byte and reads `bytes` into one reused buffer, `rounds` times.
 * Prints one line: bytes, best and median MB/s, CPU seconds per GiB of sender and receiver.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void die(const char *what) { perror(what); exit(1); }

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static double cpu_s(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return u.ru_utime.tv_sec + u.ru_stime.tv_sec + (u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
}

static void pin(int cpu)
{
    cpu_set_t set;
    if (cpu < 0) return;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    if (sched_setaffinity(0, sizeof set, &set)) die("sched_setaffinity");
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void sender(int fd, char *buffer, size_t bytes, int report)
{
    char ask;
    double start = cpu_s(), used;
    while (recv(fd, &ask, 1, 0) == 1) {
        for (size_t done = 0; done < bytes;) {
            ssize_t n = send(fd, buffer + done, bytes - done, MSG_NOSIGNAL);
            if (n <= 0) die("send");
            done += (size_t)n;
        }
    }
    used = cpu_s() - start;
    if (write(report, &used, sizeof used) != sizeof used) die("report");
    exit(0);
}

int main(int argc, char **argv)
{
    size_t bytes = argc > 1 ? strtoull(argv[1], 0, 10) : 64u << 20;
    int rounds = argc > 2 ? atoi(argv[2]) : 10;
    int sender_cpu = argc > 3 ? atoi(argv[3]) : -1, receiver_cpu = argc > 4 ? atoi(argv[4]) : -1;
    int one = 1, report[2], fd, listener = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;
    char *buffer = malloc(bytes);
    double *rates = malloc(sizeof *rates * (size_t)rounds);

    if (!buffer || !rates || rounds < 1 || bytes < 1) { fprintf(stderr, "bad arguments\n"); return 2; }
    memset(buffer, 7, bytes);
    if (bind(listener, (struct sockaddr *)&at, len) || listen(listener, 1) || pipe(report)) die("listen");
    getsockname(listener, (struct sockaddr *)&at, &len);
    if (fork() == 0) {
        pin(sender_cpu);
        memset(buffer, 9, bytes); /* its own pages */
        fd = accept(listener, 0, 0);
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        sender(fd, buffer, bytes, report[1]);
    }
    pin(receiver_cpu);
    fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(fd, (struct sockaddr *)&at, len)) die("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    double cpu = cpu_s(), peer = 0;
    for (int round = 0; round < rounds; round++) {
        double start = now_s();
        if (send(fd, "g", 1, MSG_NOSIGNAL) != 1) die("send");
        for (size_t done = 0; done < bytes;) {
            ssize_t n = recv(fd, buffer + done, bytes - done, 0);
            if (n <= 0) die("recv");
            done += (size_t)n;
        }
        rates[round] = bytes / (now_s() - start) / 1e6;
    }
    cpu = cpu_s() - cpu;
    shutdown(fd, SHUT_WR);
    if (read(report[0], &peer, sizeof peer) != sizeof peer) die("report");
    wait(0);
    qsort(rates, (size_t)rounds, sizeof *rates, by_value);
    double gib = (double)bytes * rounds / (1 << 30);
    printf("bytes %zu best_mb_s %.0f median_mb_s %.0f cpu_s_gib_sender %.3f cpu_s_gib_receiver %.3f\n", bytes,
           rates[rounds - 1], rates[rounds / 2], peer / gib, cpu / gib);
    return 0;
}
