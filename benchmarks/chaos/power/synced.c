/* A library for LD_PRELOAD that records what each fsync(2) and fdatasync(2) below a folder has secured.
 *
 *   SYNCED_ROOT   the folder, as realpath(3) has it
 *   SYNCED_LOG    the log; beside it, LOG.shadow/ holds the contents as of the last sync
 *
 * A record is a head and its body. "F": a file with its size, and the blocks that have changed since its last sync.
 * "D": the names in a folder. A file is known by its inode and time of creation, so that it keeps its contents when it
 * is renamed, and a new file on an old inode begins empty. The record is in the log before the call returns.
 *
 * A file is read through its own descriptor: closing another one would end the POSIX locks of the process, which SQLite
 * needs. Not recorded: sync(2), O_SYNC, and what is written through a mapping.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define BLOCK 4096
#define CHUNK (64 * BLOCK)

struct key { uint64_t inode, born; };
struct head { char magic[4]; uint32_t kind; struct key key; uint64_t size, body; };
struct buffer { char *data; size_t used, room; };

static void add(struct buffer *to, const void *data, size_t count) {
    if (to->used + count > to->room) {
        to->room = (to->used + count) * 2;
        to->data = realloc(to->data, to->room);
        if (to->data == NULL) abort();
    }
    memcpy(to->data + to->used, data, count);
    to->used += count;
}

static int identify(int folder, const char *name, struct key *key, uint32_t *mode, uint64_t *size) {
    struct statx status;
    int flags = AT_SYMLINK_NOFOLLOW | (*name ? 0 : AT_EMPTY_PATH);
    if (statx(folder, name, flags, STATX_BASIC_STATS | STATX_BTIME, &status)) return -1;
    key->inode = status.stx_ino;
    key->born = (uint64_t)status.stx_btime.tv_sec * 1000000000u + status.stx_btime.tv_nsec;
    *mode = status.stx_mode;
    *size = status.stx_size;
    return 0;
}

static void add_file(struct buffer *body, int descriptor, const char *path, const char *log, struct key key, uint64_t size) {
    static _Thread_local char now[CHUNK], before[CHUNK];
    char shadow_path[4200];
    snprintf(shadow_path, sizeof shadow_path, "%s.shadow/%llx-%llx", log, (unsigned long long)key.inode,
             (unsigned long long)key.born);
    int shadow = open(shadow_path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (shadow < 0) abort();
    fchmod(shadow, 0666); /* for the other users of the recording, whatever the umask */
    /* Only files that are opened for writing alone are opened again. */
    int own = (fcntl(descriptor, F_GETFL) & O_ACCMODE) == O_WRONLY ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    int source = own >= 0 ? own : descriptor;
    for (uint64_t at = 0; at < size; at += CHUNK) {
        size_t want = size - at < CHUNK ? size - at : CHUNK;
        ssize_t count = pread(source, now, want, at), old = pread(shadow, before, want, at);
        for (ssize_t first = 0; first < count; first += BLOCK) {
            uint64_t place = at + first, length = count - first < BLOCK ? count - first : BLOCK;
            if (first + (ssize_t)length <= old && !memcmp(now + first, before + first, length)) continue;
            add(body, &place, sizeof place);
            add(body, &length, sizeof length);
            add(body, now + first, length);
            if (pwrite(shadow, now + first, length, place) < 0) abort();
        }
    }
    if (ftruncate(shadow, size)) abort();
    close(shadow);
    if (own >= 0) close(own);
}

static void add_folder(struct buffer *body, int descriptor) {
    int own = openat(descriptor, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *folder = own < 0 ? NULL : fdopendir(own);
    if (folder == NULL) return;
    for (struct dirent *entry; (entry = readdir(folder));) {
        struct key key;
        uint32_t mode, length = strlen(entry->d_name);
        uint64_t size;
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        if (identify(own, entry->d_name, &key, &mode, &size)) continue;
        add(body, &key, sizeof key);
        add(body, &mode, sizeof mode);
        add(body, &length, sizeof length);
        add(body, entry->d_name, length);
    }
    closedir(folder);
}

static void record(int descriptor) {
    const char *root = getenv("SYNCED_ROOT"), *log = getenv("SYNCED_LOG");
    char link[64], path[4097];
    if (root == NULL || log == NULL) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return;
    path[length] = 0;
    size_t depth = strlen(root);
    if (strncmp(path, root, depth) || (path[depth] && path[depth] != '/')) return;
    int out = open(log, O_WRONLY | O_APPEND | O_CLOEXEC);
    if (out < 0) return;
    flock(out, LOCK_EX);
    struct head head = {{'S', 'Y', 'N', 'C'}, 0, {0, 0}, 0, 0};
    struct buffer all = {NULL, 0, 0};
    uint32_t mode;
    if (!identify(descriptor, "", &head.key, &mode, &head.size)) {
        add(&all, &head, sizeof head);
        if (S_ISDIR(mode)) add_folder(&all, descriptor);
        else add_file(&all, descriptor, path, log, head.key, head.size);
        head.kind = S_ISDIR(mode) ? 'D' : 'F';
        head.body = all.used - sizeof head;
        memcpy(all.data, &head, sizeof head);
        for (size_t done = 0; done < all.used;) {
            ssize_t count = write(out, all.data + done, all.used - done);
            if (count < 0) abort();
            done += count;
        }
    }
    free(all.data);
    close(out); /* ends the lock */
}

typedef int (*sync_call)(int);

static int call(const char *name, int descriptor) {
    sync_call next = (sync_call)dlsym(RTLD_NEXT, name);
    int result = next(descriptor), number = errno;
    if (result == 0) record(descriptor);
    errno = number;
    return result;
}

int fsync(int descriptor) { return call("fsync", descriptor); }

int fdatasync(int descriptor) { return call("fdatasync", descriptor); }
