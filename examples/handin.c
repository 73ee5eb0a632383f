/* Find the first NaN or Inf of a row-major float tensor and hand it in:  ./handin | firetower fires import - */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static void hand_in(const char *stage, int layer, const float *x, long rows, long columns) {
    for (long i = 0; i < rows * columns; i++) {
        uint32_t bits;
        if (isfinite(x[i])) continue;
        memcpy(&bits, &x[i], sizeof bits);
        printf("{\"runtime\": \"my-engine 1.0\", \"origin\": {\"stage\": \"%s\", \"layer\": %d}, \"first\": ", stage, layer);
        printf("{\"dtype\": \"float32\", \"bits\": \"%08x\", \"flat_index\": %ld, ", (unsigned)bits, i);
        printf("\"shape\": [%ld, %ld]}}\n", rows, columns);
        return;
    }
}

int main(void) { float x[2][3] = {{1, 2, 3}, {4, INFINITY, NAN}}; hand_in("swiglu", 12, &x[0][0], 2, 3); return 0; }
