/* Round trips and one-way messages over a plain TCP socket: the limit that messaging is compared with.
 *
 *   ping_pong serve            prints the port, echoes; a message whose first byte is 1 is only counted, 2 is answered
 *   ping_pong run PORT SIZE ROUNDS MESSAGES   prints: p50_us X p99_us Y messages_s Z
 *
 * Blocking calls, TCP_NODELAY, preallocated buffers, SIZE bytes per message in both directions.
 */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { SIZE_MAX_BYTES = 1 << 20 };
static char buffer[SIZE_MAX_BYTES];

static void die(const char *what) {
    perror(what);
    exit(1);
}

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static int receive_all(int fd, char *to, size_t size) {
    while (size > 0) {
        ssize_t got = recv(fd, to, size, 0);
        if (got <= 0) return 0;
        to += got;
        size -= (size_t)got;
    }
    return 1;
}

static void send_all(int fd, const char *from, size_t size) {
    while (size > 0) {
        ssize_t sent = send(fd, from, size, MSG_NOSIGNAL);
        if (sent <= 0) die("send");
        from += sent;
        size -= (size_t)sent;
    }
}

static void no_delay(int fd) {
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

static int serve(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, length) || listen(listener, 1)) die("listen");
    getsockname(listener, (struct sockaddr *)&address, &length);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    int fd = accept(listener, NULL, NULL);
    if (fd < 0) die("accept");
    no_delay(fd);
    uint32_t size;
    if (!receive_all(fd, (char *)&size, sizeof size) || size > SIZE_MAX_BYTES) return 1;
    while (receive_all(fd, buffer, size))
        if (buffer[0] != 1) send_all(fd, buffer, size);
    return 0;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int run(int port, uint32_t size, int rounds, int messages) {
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address)) die("connect");
    no_delay(fd);
    send_all(fd, (const char *)&size, sizeof size);
    double *times = calloc((size_t)rounds, sizeof *times);
    if (times == NULL) die("calloc");
    for (int i = 0; i < rounds + rounds / 10; i++) {
        double begin = now_us();
        send_all(fd, buffer, size);
        if (!receive_all(fd, buffer, size)) die("recv");
        if (i >= rounds / 10) times[i - rounds / 10] = now_us() - begin;
    }
    qsort(times, (size_t)rounds, sizeof *times, by_value);
    double begin = now_us();
    buffer[0] = 1;
    for (int i = 0; i < messages; i++) send_all(fd, buffer, size);
    buffer[0] = 2;
    send_all(fd, buffer, size);
    if (!receive_all(fd, buffer, size)) die("recv");
    double seconds = (now_us() - begin) / 1e6;
    printf("p50_us %.2f p99_us %.2f messages_s %.0f\n", times[rounds / 2], times[rounds * 99 / 100], messages / seconds);
    free(times);
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 2 && strcmp(argv[1], "serve") == 0) return serve();
    if (argc == 6 && strcmp(argv[1], "run") == 0) {
        uint32_t size = (uint32_t)atoi(argv[3]);
        int rounds = atoi(argv[4]);
        if (size == 0 || size > SIZE_MAX_BYTES || rounds < 10) return 2;
        return run(atoi(argv[2]), size, rounds, atoi(argv[5]));
    }
    fprintf(stderr, "usage: ping_pong serve | run PORT SIZE ROUNDS MESSAGES\n");
    return 2;
}
